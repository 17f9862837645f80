// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFillAndWrongAgree(t *testing.T) {
	c := cellID{Request: 42, Part: partNumber("k"), Layer: 7}
	for _, n := range []int{1, 7, 8, 31, 32, 33, 4096, 512*788 + 5} {
		b := make([]byte, n)
		c.fill(b)
		require.Zero(t, c.wrong(b), "%d bytes", n)
		b[n-1] ^= 1
		require.EqualValues(t, 1, c.wrong(b), "%d bytes", n)
	}
}

func TestDifferencesShow(t *testing.T) {
	const n = 66 << 10
	c, good := cellID{Request: 1, Part: partNumber("k")}, make([]byte, n)
	c.fill(good)
	for name, change := range map[string]func(b []byte){
		"another block": func(b []byte) { (&cellID{Request: 2, Part: c.Part}).fill(b) },
		"another layer": func(b []byte) { (&cellID{Request: 1, Part: c.Part, Layer: 1}).fill(b) },
		"another part":  func(b []byte) { (&cellID{Request: 1, Part: partNumber("v")}).fill(b) },
		"another token": func(b []byte) { (&cellID{Request: 1, Part: c.Part, Token: 1}).fill(b) },
		"shifted":       func(b []byte) { copy(b, good[8:]) },
		"two pages change": func(b []byte) {
			copy(b[4096:8192], good)
			copy(b, good[4096:8192])
		},
	} {
		b := append([]byte(nil), good...)
		change(b)
		require.NotZero(t, c.wrong(b), name)
	}
}

func TestCountWrong(t *testing.T) {
	b := make([]byte, 10001)
	require.EqualValues(t, len(b), countWrong(b, 7))
	require.Zero(t, countWrong(b, 0))
	b[4096], b[10000] = 1, 1
	require.EqualValues(t, 2, countWrong(b, 0))
}
