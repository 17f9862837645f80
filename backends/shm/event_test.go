// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// TestAPeerThatBlocksItsEvent: a peer shows an event that does not block, then makes it one that
// does, and fills it. The owner takes messages and revokes all the same.
func TestAPeerThatBlocksItsEvent(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{RingBytes: ringBytesMin})
	other, _ := share(t, owner, drivertest.HostMemory, 4096)
	p := dial(t, b, owner.Addr())
	require.NoError(t, unix.SetNonblock(b.event, false))
	full := binary.LittleEndian.AppendUint64(nil, 1<<64-2)
	_, err := unix.Write(b.event, full)
	require.NoError(t, err)
	for err == nil { // until the ring is full: the owner is to tell when there is room
		err = p.Submit(1, &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail,
			Notify: make([]byte, 20<<10)})
	}
	require.ErrorIs(t, err, driver.ErrFull)
	var msgs [4]driver.Message
	n, err := owner.Receive(msgs[:])
	require.NoError(t, err)
	require.Positive(t, n)
	require.NoError(t, other.Revoke(t.Context()))
	require.NoError(t, unix.SetNonblock(b.event, true))
}
