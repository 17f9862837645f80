// SPDX-License-Identifier: Apache-2.0

package cuda

import _ "embed" // the modules

// With the PTX version that has the instructions and no later one: 7.8 is CUDA 11.8, driver
// 520 or newer. clang needs no CUDA SDK for it. Its bytes are committed, and a test makes them
// again.
//
//go:generate clang-19 -x cuda --cuda-device-only --cuda-gpu-arch=sm_80 -nocudainc -nocudalib --cuda-feature=+ptx78 -O3 -std=c++17 -S gather.cu -o gather_sm80.ptx
//go:generate clang-19 -x cuda --cuda-device-only --cuda-gpu-arch=sm_80 -nocudainc -nocudalib --cuda-feature=+ptx78 -O3 -std=c++17 -S digest.cu -o digest_sm80.ptx
//go:generate clang-19 -x cuda --cuda-device-only --cuda-gpu-arch=sm_80 -nocudainc -nocudalib --cuda-feature=+ptx78 -O3 -std=c++17 -S sparse.cu -o sparse_sm80.ptx

//go:embed gather_sm80.ptx
var gather80 string

//go:embed digest_sm80.ptx
var digest80 string

//go:embed sparse_sm80.ptx
var sparse80 string

// sums is the module of Summer.
var sums = Module{"digest_sm80", digest80, 80, 11080, []string{kernelDigest}}

const kernelDigest = "sl_digest_cells"

// lookups is the module of the lookup that package csrc/sparse does on the CPU. Its kernels are
// launched in this order.
var lookups = Module{"sparse_sm80", sparse80, 80, 11080, []string{kernelLookupCheck,
	kernelLookupSets}}

const (
	kernelLookupCheck = "sl_lookup_check"
	kernelLookupSets  = "sl_lookup_sets"
)

// The kernels by name. Each takes one struct sl_move (gather.h) by value, that for nests one
// struct sl_nested.
const (
	KernelRows  = "sl_move_rows"  // through registers
	KernelAsync = "sl_move_async" // by asynchronous copies into shared memory
	KernelNest  = "sl_move_nest"  // through registers, each entry a nest of loops
)

// Module is a program for a card, which its driver compiles.
type Module struct {
	Name    string
	PTX     string
	Compute int      // the least compute capability, as 10 * major + minor
	Driver  int      // the least version that cuDriverGetVersion answers
	Kernels []string // what it has
}

// moves is the module of Kernels.
var moves = Module{"gather_sm80", gather80, 80, 11080, []string{KernelRows, KernelAsync,
	KernelNest}}
