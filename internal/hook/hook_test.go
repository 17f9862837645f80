// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHook(t *testing.T) {
	var h Of[int]
	h.At(1) // no test has set it
	first := 0
	h.First(2, func() { first++ })
	for _, s := range []int{1, 2, 2} {
		h.At(s)
	}
	require.Equal(t, 1, first)
	var came []int
	h.Set(func(s int) { came = append(came, s) })
	h.At(2)
	h.First(2, nil)
	h.At(3)
	require.Equal(t, []int{2}, came)
}
