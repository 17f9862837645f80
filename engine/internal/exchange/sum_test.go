// SPDX-License-Identifier: Apache-2.0

package exchange

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

var token = []byte("a token of some bytes")

// body writes a request as a peer would, and returns what follows the tag.
func body(t testing.TB, descs []driver.Desc, p *driver.Pattern) []byte {
	t.Helper()
	b, err := AppendSum(nil, token, descs, p)
	require.NoError(t, err)
	return SumBody(b)
}

func TestSums(t *testing.T) {
	far := driver.Side{Base: 100, Stride: 50, List: []uint32{2, 0, 1}}
	for name, c := range map[string]struct {
		descs []driver.Desc
		p     *driver.Pattern
		want  [][2]uint64
	}{
		"descriptors": {[]driver.Desc{{Remote: 5, Len: 10}, {Remote: 500, Len: 1}}, nil,
			[][2]uint64{{5, 10}, {500, 1}}},
		"a listed one": {nil, &driver.Pattern{Run: 16, Count: 3, Remote: far},
			[][2]uint64{{200, 16}, {100, 16}, {150, 16}}},
		"one that is not": {nil, &driver.Pattern{Run: 16, Count: 2,
			Remote: driver.Side{Base: 100, Stride: 50}}, [][2]uint64{{100, 16}, {150, 16}}},
	} {
		var s Sum
		require.NoError(t, s.Parse(body(t, c.descs, c.p)), name)
		require.Equal(t, len(c.want), s.Count, name)
		require.Equal(t, token, s.Token, name)
		for i, want := range c.want {
			off, n, ok := s.At(i, 1000)
			require.True(t, ok, name)
			require.Equal(t, want, [2]uint64{off, n}, "%s: range %d", name, i)
		}
		end := c.want[0][0] + c.want[0][1]
		_, _, ok := s.At(0, end)
		require.True(t, ok, "%s: the end of the memory", name)
		_, _, ok = s.At(0, end-1)
		require.False(t, ok, "%s: past the end of the memory", name)
	}
	_, err := AppendSum(nil, make([]byte, SumTokenMax+1), nil, nil)
	require.ErrorIs(t, err, driver.ErrBounds)
}

// FuzzSum has what a peer may say reach no byte outside the memory that it named.
func FuzzSum(f *testing.F) {
	f.Add(body(f, []driver.Desc{{Remote: 5, Len: 10}}, nil))
	f.Add(body(f, []driver.Desc{{Remote: math.MaxUint64 - 3, Len: 10}}, nil))
	for _, p := range []driver.Pattern{
		{Run: 16, Count: 2, Remote: driver.Side{Base: 1, Stride: 50, List: []uint32{2, 0}}},
		{Run: math.MaxUint64, Count: 2,
			Remote: driver.Side{Base: math.MaxUint64, Stride: math.MaxUint64}},
		{Run: 1, Count: 2, Remote: driver.Side{Stride: 1 << 63, List: []uint32{2, math.MaxUint32}}},
	} {
		f.Add(body(f, nil, &p))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		const size = 4096
		var s Sum
		if s.Parse(b) != nil {
			return
		}
		for i := range min(s.Count, 1<<10) {
			if off, n, ok := s.At(i, size); ok && (off > size || n > size-off) {
				t.Errorf("%d bytes at %d of %d", n, off, size)
			}
		}
	})
}
