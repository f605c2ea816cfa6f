#include "lanes_avx2.h"

#include "kernels.h"

namespace jaxlab {

const Kernels kAvx2 = JAXLAB_KERNELS;

}  // namespace jaxlab
