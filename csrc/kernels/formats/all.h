// All formats of weights; included once more for each level, see levels.h.

#include "compact.h"
#include "packed.h"
