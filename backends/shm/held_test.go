// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// unlent is memory whose descriptors its owner keeps, as UCX does.
type unlent struct {
	driver.Shared
	holds int
}

func (*unlent) Lend(func([]driver.Extent) error) error { return driver.ErrNotSupported }

func (u *unlent) Hold() (release func(), err error) {
	u.holds++
	return func() { u.holds-- }, nil
}

// TestMemoryThatIsNotLent: peers reach it by system calls, so its pages stay where they are for as
// long as it is registered.
func TestMemoryThatIsNotLent(t *testing.T) {
	b, err := New(Config{})
	require.NoError(t, err)
	defer b.Close()
	u := &unlent{}
	m, err := b.Register(driver.Segment{Kind: driver.DRAM, Len: 4096, Mem: make([]byte, 4096),
		Shared: u, Secret: [16]byte{1}})
	require.NoError(t, err)
	require.Nil(t, m.(*memory).arena)
	require.Equal(t, 1, u.holds)
	for range 2 {
		require.NoError(t, m.Revoke(t.Context()))
	}
	require.Zero(t, u.holds)
}
