"""GPUs: collectives by kernels over their memory."""
