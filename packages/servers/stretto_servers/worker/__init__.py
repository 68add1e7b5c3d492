"""Code that runs inside a server's workers, in the server's environment, where stretto cannot be imported.

This folder is on the server's PYTHONPATH. vLLM adds `vllm_extension.Loader` as a base class of its worker. SGLang finds
the plugin `sglang_extension` by the entry point in ``stretto_worker-1.dist-info``.
"""
