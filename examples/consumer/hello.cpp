// Nothing but Tessera: the installed library itself has to find libtorch.
#include <tessera/tessera.h>

int main() {
  tessera::run(2, [] { tessera::get_rank(); });
}
