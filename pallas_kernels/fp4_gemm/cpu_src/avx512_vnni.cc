// As avx512.cc, compiled for a CPU that has the byte products of VNNI.
#include "lanes_avx512.h"

#include "kernels.h"

namespace jaxlab {

const Kernels kAvx512Vnni = JAXLAB_KERNELS;

}  // namespace jaxlab
