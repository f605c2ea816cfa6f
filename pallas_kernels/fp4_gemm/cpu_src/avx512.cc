#include "lanes_avx512.h"

#include "kernels.h"

namespace jaxlab {

const Kernels kAvx512 = JAXLAB_KERNELS;

}  // namespace jaxlab
