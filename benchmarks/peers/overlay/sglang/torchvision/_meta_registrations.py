"""Left empty: what torchvision registers here exists only beside a CUDA build of torch."""
