# Compiles the sources of a target in groups of up to sixteen files of one folder (a "unity build").
#
# Most of what a file costs is the same for all: reading libtorch's headers and instantiating their templates. A group pays that
# once: two groups of eight files (ops) took 69 s of CPU time, one of sixteen 44 s. In return, names in anonymous namespaces must be
# unique within a folder. Sources named after the target, and those with compile options of their own, are compiled alone.
# TOGETHER, among their names, makes groups that span folders.
function(tessera_unity target)
  if(NOT TESSERA_UNITY_BUILD)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # Types of one source file look to the compiler as if a header defined them.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cpp$")
  foreach(source IN LISTS sources)
    get_filename_component(folder "${source}" DIRECTORY)
    if("TOGETHER" IN_LIST ARGN)
      set(folder together)
    endif()
    string(MAKE_C_IDENTIFIER "group_${folder}" folder)
    if(NOT DEFINED ${folder})
      set(${folder} 0)
    endif()
    math(EXPR group "${${folder}} / 16")
    math(EXPR ${folder} "${${folder}} + 1")
    if(NOT source IN_LIST ARGN)
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP "${folder}_${group}")
    endif()
  endforeach()
endfunction()
