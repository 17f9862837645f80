// SPDX-License-Identifier: Apache-2.0

package cuda

// Moves says what a driver has beside launching kernels.
type Moves struct {
	Copies bool // Copier
	Graphs bool // Capture
}

// Marks is how many marks a Copier has.
const Marks = 4
