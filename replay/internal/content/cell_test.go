// SPDX-License-Identifier: Apache-2.0

package content

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFillAndWrongAgree(t *testing.T) {
	c := Cell{Request: 42, Part: PartOf("k"), Layer: 7}
	for _, n := range []int{1, 7, 8, 31, 32, 33, 4096, 512*788 + 5} {
		b := make([]byte, n)
		c.Fill(b)
		require.Zero(t, c.Wrong(b), "%d bytes", n)
		b[n-1] ^= 1
		require.EqualValues(t, 1, c.Wrong(b), "%d bytes", n)
	}
}

func TestDifferencesShow(t *testing.T) {
	const n = 66 << 10
	c, good := Cell{Request: 1, Part: PartOf("k")}, make([]byte, n)
	c.Fill(good)
	fill := func(c Cell, b []byte) { c.Fill(b) }
	for name, change := range map[string]func(b []byte){
		"another block": func(b []byte) { fill(Cell{Request: 2, Part: c.Part}, b) },
		"another layer": func(b []byte) { fill(Cell{Request: 1, Part: c.Part, Layer: 1}, b) },
		"another part":  func(b []byte) { fill(Cell{Request: 1, Part: PartOf("v")}, b) },
		"another token": func(b []byte) { fill(Cell{Request: 1, Part: c.Part, Token: 1}, b) },
		"shifted":       func(b []byte) { copy(b, good[8:]) },
		"two pages change": func(b []byte) {
			copy(b[4096:8192], good)
			copy(b, good[4096:8192])
		},
	} {
		b := append([]byte(nil), good...)
		change(b)
		require.NotZero(t, c.Wrong(b), name)
	}
}

func TestCountWrong(t *testing.T) {
	b := make([]byte, 10001)
	require.EqualValues(t, len(b), CountWrong(b, 7))
	require.Zero(t, CountWrong(b, 0))
	b[4096], b[10000] = 1, 1
	require.EqualValues(t, 2, CountWrong(b, 0))
}
