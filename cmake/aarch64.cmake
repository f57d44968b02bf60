# Compiles for aarch64 with Debian's cross compiler (g++-aarch64-linux-gnu), to see that it can be: the libtorch that is here is for
# another processor, so nothing is linked.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE BOTH)
set(CMAKE_CXX_CREATE_SHARED_LIBRARY "<CMAKE_COMMAND> -E touch <TARGET>")
set(TESSERA_ISAL isal CACHE FILEPATH "")  # of another processor as well
