# Finds libtorch and gives the target `torch`, TESSERA_TORCH_DIR, its folder, and TESSERA_TORCH_VERSION, as 2.13.0.
#
# libtorch's own CMake files refuse to work where libtorch was built with CUDA but the machine has no CUDA toolkit or only a part of it, as is usual
# where torch came from pip. There, libtorch is used by hand, for CPU tensors; the nccl backend is then left out.
include_guard(GLOBAL)

if(SKBUILD)
  # Building the Python package: the torch that Python would import.
  find_package(Python REQUIRED COMPONENTS Interpreter)
  execute_process(COMMAND "${Python_EXECUTABLE}" -c
                          "import importlib.util, os; print(os.path.dirname(importlib.util.find_spec('torch').origin))"
                  OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  list(PREPEND CMAKE_PREFIX_PATH "${torch_dir}")
endif()

set(TESSERA_TORCH_DIR "")
# The last folder is where pip puts torch, if this file lies in the package that pip installed.
find_file(TESSERA_TORCH_CONFIG TorchConfig.cmake PATH_SUFFIXES share/cmake/Torch Torch NO_CACHE
          PATHS "${Torch_DIR}" "${CMAKE_CURRENT_LIST_DIR}/../../../../torch" NO_CMAKE_FIND_ROOT_PATH)
if(TESSERA_TORCH_CONFIG)
  get_filename_component(TESSERA_TORCH_DIR "${TESSERA_TORCH_CONFIG}/../../../.." ABSOLUTE)
endif()

if(EXISTS "${TESSERA_TORCH_DIR}/lib/libtorch_cuda.so")
  find_package(CUDAToolkit QUIET)
  if(NOT TARGET CUDA::cudart)
    set(TESSERA_TORCH_BY_HAND ON)
    message(STATUS "libtorch has CUDA, but this machine has no CUDA runtime library: building for CPU tensors, without nccl")
  endif()
endif()

if(TESSERA_TORCH_BY_HAND)
  if(NOT TESSERA_TORCH_DIR)
    message(FATAL_ERROR "libtorch was not found; name its folder in CMAKE_PREFIX_PATH")
  endif()
  add_library(torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(torch SYSTEM INTERFACE "${TESSERA_TORCH_DIR}/include"
                                                    "${TESSERA_TORCH_DIR}/include/torch/csrc/api/include")
  target_compile_definitions(torch INTERFACE USE_C10D_GLOO USE_DISTRIBUTED USE_RPC USE_TENSORPIPE)
  target_link_libraries(torch INTERFACE "${TESSERA_TORCH_DIR}/lib/libtorch.so" "${TESSERA_TORCH_DIR}/lib/libtorch_cpu.so"
                                        "${TESSERA_TORCH_DIR}/lib/libc10.so")
else()
  find_package(Torch 2.13 REQUIRED PATHS "${TESSERA_TORCH_DIR}")
  set(TESSERA_TORCH_DIR "${TORCH_INSTALL_PREFIX}")
endif()

file(STRINGS "${TESSERA_TORCH_DIR}/share/cmake/Torch/TorchConfigVersion.cmake" TESSERA_TORCH_VERSION REGEX "^set\\(PACKAGE_VERSION ")
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" TESSERA_TORCH_VERSION "${TESSERA_TORCH_VERSION}")
