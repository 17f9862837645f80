// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"math/rand/v2"
)

const (
	testBytes = 4 << 20
	testKey   = 7
)

// fill writes bytes that depend on a seed.
func fill(b []byte, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}
