# Compiles the sources of a target in groups of up to eight files of one folder (a "unity build").
#
# Most of what a file costs is the same for all: reading libtorch's headers and instantiating their templates. A group pays that
# once, which took a quarter to a third of the CPU time in the folders measured (placement, dtensor). In return, names in anonymous namespaces must be unique within a
# folder. Sources named after the target, and those with compile options of their own, are compiled alone.
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
    string(MAKE_C_IDENTIFIER "group_${folder}" folder)
    if(NOT DEFINED ${folder})
      set(${folder} 0)
    endif()
    math(EXPR group "${${folder}} / 8")
    math(EXPR ${folder} "${${folder}} + 1")
    if(NOT source IN_LIST ARGN)
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP "${folder}_${group}")
    endif()
  endforeach()
endfunction()
