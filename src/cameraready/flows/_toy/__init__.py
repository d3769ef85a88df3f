"""Laws whose flow is known, small images, small networks trained once, and distances between samples."""
