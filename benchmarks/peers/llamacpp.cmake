# llama-cpp-python forces this library of llama.cpp's programs to be built, which takes longer than all else, and does not
# use it.
set(LLAMA_BUILD_COMMON OFF)
