"""The study of the band: what is trained, by which losses, and what is measured."""
