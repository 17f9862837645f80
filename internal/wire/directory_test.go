// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// many describes n regions, whose names share most of what they say where same is set.
func many(n int, same bool) *Description {
	d := &Description{Name: "x", Backends: []Backend{{Name: "tcp", Addr: []byte("there")}}}
	prefix := ""
	if same {
		prefix = strings.Repeat("n", NameMax-10)
	}
	for i := range n {
		d.Regions = append(d.Regions, Region{Name: fmt.Sprintf("%s%010d", prefix, i),
			Size: uint64(i + 1), Set: 1, Tokens: [][]byte{[]byte("12345678")}})
	}
	return d
}

// TestRegionByName finds each region, in whatever order they were sent, and of several of one name
// the last.
func TestRegionByName(t *testing.T) {
	for n := range 3*markEvery + 2 {
		d := many(n, n%2 == 0)
		rand.Shuffle(n, func(i, j int) { d.Regions[i], d.Regions[j] = d.Regions[j], d.Regions[i] })
		for i := 3; i < n; i += 5 {
			d.Regions[i].Name = d.Regions[i-3].Name
		}
		b, err := Encode(nil, d)
		require.NoError(t, err)
		dir, err := Read(b)
		require.NoError(t, err)
		require.Equal(t, n, dir.Len())
		require.Equal(t, d.Regions, slices.Collect(dir.All()))
		last := map[string]Region{}
		for _, r := range d.Regions {
			last[r.Name] = r
		}
		for name, want := range last {
			r, known := dir.Region(name)
			require.True(t, known)
			require.Equal(t, want, r)
		}
		_, known := dir.Region("another")
		require.False(t, known)
		only, is := dir.Only()
		require.Equal(t, n == 1, is)
		if is {
			require.Equal(t, d.Regions[0], only)
		}
	}
}

// TestRegionsOfOneName are found as quickly as others: a peer may send a million of them.
func TestRegionsOfOneName(t *testing.T) {
	d := many(100_000, false)
	for i := range d.Regions {
		d.Regions[i].Name = "one"
	}
	b, err := Encode(nil, d)
	require.NoError(t, err)
	dir, err := Read(b)
	require.NoError(t, err)
	for range 1000 {
		r, known := dir.Region("one")
		require.True(t, known)
		require.Equal(t, uint64(len(d.Regions)), r.Size)
	}
}

// TestWhatADescriptionTakes: of what was sent a small multiple is kept, however much the names
// share.
func TestWhatADescriptionTakes(t *testing.T) {
	for _, same := range []bool{false, true} {
		b, err := Encode(nil, many(200_000, same))
		require.NoError(t, err)
		before := heap()
		dir, err := Read(b)
		require.NoError(t, err)
		kept := int(heap()-before) + len(b)
		require.Less(t, kept, 3*len(b), "of %d bytes", len(b))
		runtime.KeepAlive(dir)
	}
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
