"""Laws whose flow is known, small images, small networks trained once, and distances between samples.

`mixtures`, `boxes` and `tilts` know velocities, posteriors and value functions exactly; `images` reads digits and patches of photographs;
`networks`, `stacked` and `classifier` are the architectures, `training` trains them, `cached` and `trained` keep them on disk; `distances` judges.
"""
