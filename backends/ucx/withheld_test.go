// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/leak"
	"github.com/sluicehq/sluice/internal/testing/withhold"
)

// TestPagesThatDoNotCome writes from memory whose pages do not come, as those of a file on a server
// that is gone: that holds up the writer, and neither the owner nor its Revoke. What comes later
// does not land.
func TestPagesThatDoNotCome(t *testing.T) {
	leak.Check(t)
	o := startOwner(t, Config{}, graceMax)
	p, key := o.connect()
	o.write(p, key, 0, ownerBytes)
	require.NoError(t, o.outcome())
	require.Equal(t, ownerBytes, o.landed())

	mem, err := unix.Mmap(-1, 0, 128<<10, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	defer unix.Munmap(mem)
	late, err := withhold.Pages(mem)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
		t.Fatal(err)
	}
	m, err := o.b.Register(driver.Segment{Kind: driver.DRAM, Len: uint64(len(mem)), Mem: mem,
		Secret: [16]byte{3}})
	require.NoError(t, err)
	o.tag++
	submitted := make(chan error, 1)
	go func() {
		submitted <- p.Submit(o.tag, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{{
			Len: uint64(len(mem)), LocalKey: m.Key(), RemoteKey: key}}})
	}()
	defer late.Supply(t)
	late.Await(t)
	o.revoke()
	late.Supply(t)
	require.NoError(t, <-submitted)
	require.Error(t, o.outcome())
	o.revoke() // the owner has handled what came before
	o.keeps(ownerBytes, "zeros landed behind the revoke")
	require.NoError(t, m.Revoke(context.Background()))
	require.NoError(t, p.Close())
}
