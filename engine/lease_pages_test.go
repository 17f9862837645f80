// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
)

// registrar notes what the engine registers last.
type registrar struct {
	*mem.Backend
	last driver.Segment
}

func (b *registrar) Register(s driver.Segment) (driver.Memory, error) {
	b.last = s
	return b.Backend.Register(s)
}

// TestLeaseWithinAPage: a backend that puts fresh pages under a lease is told that the bytes beside
// it in the same page are not its own. shm's TestRangesThatShareAPageStay has what it does then.
func TestLeaseWithinAPage(t *testing.T) {
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	of := &registrar{Backend: b}
	e := open(t, "e", func(c *Config) { c.Backends = []driver.Backend{of} })
	m, err := Alloc(8<<20+100, AllocOptions{NoHuge: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	r, err := e.Register("r", m.Segment())
	require.NoError(t, err)
	require.Nil(t, of.last.Only, "all of the memory")
	page := m.Segment().Shared.(interface{ PageBytes() uint64 }).PageBytes()
	for _, c := range []struct {
		off, n uint64
		within bool
	}{{0, page, false}, {page, 3 * page, false}, {8, page - 8, true}, {page, 64, true},
		{page, 2*page + 1, true}, {8 << 20 / 2, 8 << 20 / 2, false},
		{8 << 20 / 2, 8<<20/2 + 100, false}} {
		l, err := r.Lease(c.off, c.n, LeaseOptions{})
		require.NoError(t, err)
		want := driver.Ranges(nil)
		if c.within {
			want = driver.Ranges{{Len: c.n}}
		}
		require.Equal(t, want, of.last.Only, "[%d, +%d)", c.off, c.n)
		require.NoError(t, l.Revoke(within(t)))
	}
	require.NoError(t, r.Close())
	part, err := m.Segment().Slice(page/2, page, [16]byte{})
	require.NoError(t, err)
	r, err = e.Register("part", part)
	require.NoError(t, err)
	require.Equal(t, driver.Ranges{{Len: page}}, of.last.Only, "a region of a part of two pages")
	require.NoError(t, r.Close())
}
