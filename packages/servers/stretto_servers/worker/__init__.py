"""What runs inside the workers of a server, in its environment; nothing of stretto is imported there.

The folder stands in the server's PYTHONPATH. vLLM mixes `vllm_extension.Loader` into its worker, SGLang finds the
plugin `sglang_extension` by the entry point in ``stretto_worker-1.dist-info``.
"""
