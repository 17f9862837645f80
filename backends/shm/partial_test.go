// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// hugePages is memory that says that it has reserved huge pages.
type hugePages struct{ *hostmem.Buffer }

func (*hugePages) PageBytes() uint64 { return 2 << 20 }

// TestRangesThatShareAPageStay: what lies beside a range in the same page is the program's, which
// may write it now, so no fresh page goes there, and a frozen writer leaves no proof. Whole pages
// have one.
func TestRangesThatShareAPageStay(t *testing.T) {
	const page = 4096
	buf, err := hostmem.Alloc(5*page-100, hostmem.Options{Purpose: "test", Huge: hostmem.HugeNone})
	require.NoError(t, err)
	b := hasty(t)
	t.Cleanup(func() { _ = b.Close(); _ = buf.Close() })
	renewed := 0
	reserved := &hugePages{buf} // a whole page of 4 KiB is part of one of 2 MiB there
	defer buf.OnRenew(func() func() bool { renewed++; return nil })()
	for name, c := range map[string]struct {
		only driver.Ranges
		want error
		huge bool
	}{
		"begins within": {driver.Ranges{{Off: page + 8, Len: page - 8}}, driver.ErrBusy, false},
		"ends within":   {driver.Ranges{{Off: page, Len: page - 8}}, driver.ErrBusy, false},
		"the second one": {driver.Ranges{{Off: 0, Len: page}, {Off: 2 * page, Len: 8}},
			driver.ErrBusy, false},
		"of huge pages": {driver.Ranges{{Off: page, Len: page}}, driver.ErrBusy, true},
		"whole pages": {driver.Ranges{{Off: 0, Len: page}, {Off: 2 * page, Len: 2 * page}},
			nil, false},
		"to the end": {driver.Ranges{{Off: 4 * page, Len: page - 100}}, nil, false},
	} {
		seg := buf.Segment()
		if seg.Only = c.only; c.huge {
			seg.Shared = reserved
		}
		m, err := b.Register(seg)
		require.NoError(t, err, name)
		p := dial(t, open(t, Config{}), b.Addr())
		renewed = 0
		silent(p, m.Key(), driver.Write)
		err = m.Revoke(t.Context())
		require.True(t, errors.Is(err, c.want), "%s: %v", name, err)
		require.Equal(t, c.want == nil, renewed > 0, name)
	}
}
