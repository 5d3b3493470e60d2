// All formats of weights; included once more for each level, see levels.h.

// Others are made of it.
#include "scaled.h"
//
#include "compact.h"
#include "fp4.h"
#include "fp8.h"
#include "int4.h"
#include "int8.h"
#include "packed.h"
