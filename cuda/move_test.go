// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

func random(rng *rand.Rand, n int) []byte {
	b := make([]byte, n+8)
	for i := 0; i < n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], rng.Uint64())
	}
	return b[:n]
}

// TestRefusedPatterns: no kernel takes these, and the error says what it would take.
func TestRefusedPatterns(t *testing.T) {
	at := func(at, stride uint64) side { return side{at, 1 << 20, stride} }
	for name, c := range map[string]struct {
		count    int
		entry    uint64
		dst, src side
		want     string
	}{
		"negative count": {-1, 16, side{}, side{}, "entries -1, want 0 to"},
		"no entry":       {1, 0, side{}, side{}, "bytes of an entry 0, want a multiple of 4"},
		"odd entry":      {1, 130, side{}, side{}, "bytes of an entry 130"},
		"huge entry":     {1, EntryMax + 4, side{}, side{}, "bytes of an entry"},
		"short stride": {1, 16, at(0, 12), side{},
			"stride 12, want a multiple of 4, at least the entry's 16"},
		"odd stride":  {1, 16, side{}, at(0, 17), "stride 17"},
		"odd address": {1, 16, at(1, 0), side{}, "memory at 0x1 and 0x0, want multiples of 4"},
	} {
		var a args
		err := a.begin(c.count)
		if err == nil {
			err = a.fill(c.entry, c.dst, c.src)
		}
		if err == nil {
			_, err = a.plan(&hopper, Budget{SMs: 1}, false)
		}
		require.ErrorIs(t, err, driver.ErrBounds, name)
		require.ErrorContains(t, err, c.want, name)
	}
}

func TestWidth(t *testing.T) {
	for entry, want := range map[uint64]uint32{656: 16, 576: 16, 584: 8, 1152: 16, 132: 4,
		640: 16} {
		require.Equal(t, want, entries(1, entry).part[0].width, "%d bytes", entry)
	}
}
