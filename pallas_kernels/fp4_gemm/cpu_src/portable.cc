#include "lanes_portable.h"

#include "kernels.h"

namespace jaxlab {

const Kernels kPortable = JAXLAB_KERNELS;

}  // namespace jaxlab
