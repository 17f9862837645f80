// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package digest

import (
	"errors"

	"github.com/sluicehq/sluice/driver"
)

var ways = map[string]int{"plain": plain, "avx2": avx2, "avx512": avx512, "neon": neon}

// The tests compare each way that this processor has.
func init() {
	k, err := NewKey(Seed{}, "k", "bf16", 1)
	if err != nil {
		panic(err)
	}
	one := &Cells{Count: 1, Outer: Axis{N: 1}, Axis: Axis{N: 1}}
	for name, way := range ways {
		by := func(mem []byte, c *Cells, k *Key) (Digest, error) {
			if c.Empty() || !c.Valid(uint64(len(mem)), k) {
				return Sum(mem, c, k)
			}
			return sumBy(way, mem, c, k)
		}
		if _, err := by(make([]byte, 1), one, k); !errors.Is(err, driver.ErrUnavailable) {
			implementations[name] = by
		}
	}
}
