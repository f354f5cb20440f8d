"""The portable kernels: any GPU from compute capability 8.0 on."""
