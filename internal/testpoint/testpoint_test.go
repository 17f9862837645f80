// SPDX-License-Identifier: Apache-2.0

package testpoint

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFirst(t *testing.T) {
	At("none") // no test has set it
	first := 0
	First("mine", func() { first++ })
	for _, p := range []string{"other", "mine", "mine"} {
		At(p)
	}
	require.Equal(t, 1, first)
	First("mine", nil)
	At("mine")
	require.Equal(t, 1, first)
}

// test is the end of a test.
type test struct{ end func() }

func (e *test) Cleanup(f func()) { e.end = f }

// TestStand: one goroutine stands at each point, later ones pass, and the end of a test frees all.
func TestStand(t *testing.T) {
	var over test
	points := []string{"first", "second"}
	stands := Stand(&over, points...)
	passed := make(chan string, 2)
	for i, p := range points {
		go func() { At(p); passed <- p }()
		<-stands[i].Came
		At(p)
	}
	At("third")
	require.Empty(t, passed)
	stands[0].GoOn()
	require.Equal(t, "first", <-passed)
	over.end()
	require.Equal(t, "second", <-passed)
	stands = Stand(&over, "first")
	over.end()
	At("first")
	select {
	case <-stands[0].Came:
		t.Error("a goroutine came to a point after the end")
	default:
	}
}
