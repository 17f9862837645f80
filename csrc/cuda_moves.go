// SPDX-License-Identifier: Apache-2.0

package csrc

// CUDAMoves says what a driver has beside launching kernels.
type CUDAMoves struct {
	Copies  bool // CUDACopier.Copy one by one
	Batches bool // and in batches: driver 12080 and newer
	Graphs  bool // Capture
}

// CUDAMarks is how many marks a CUDACopier has.
const CUDAMarks = 4
