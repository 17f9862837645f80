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

// test is the end of a test.
type test struct{ end func() }

func (e *test) Cleanup(f func()) { e.end = f }

// TestStand: one goroutine stands at each spot, later ones pass, and the end of a test frees all.
func TestStand(t *testing.T) {
	var h Of[int]
	var over test
	stands := h.Stand(&over, 1, 2)
	passed := make(chan int, 2)
	for s := 1; s <= 2; s++ {
		go func() { h.At(s); passed <- s }()
		<-stands[s-1].Came
		h.At(s)
	}
	h.At(3)
	require.Empty(t, passed)
	stands[0].GoOn()
	require.Equal(t, 1, <-passed)
	over.end()
	require.Equal(t, 2, <-passed)
	h = Of[int]{}
	stands = h.Stand(&over, 1)
	over.end()
	h.At(1)
	select {
	case <-stands[0].Came:
		t.Error("a goroutine came to a spot after the end")
	default:
	}
}
