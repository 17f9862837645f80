// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// TestFilledAnnouncements has an owner write into the lines by which its peer announces copies: the
// peer is lost, and no call of it hangs.
func TestFilledAnnouncements(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	_, far := shared(t, owner, 4096, 1)
	_, near := shared(t, b, 4096, 2)
	p := dial(t, b, owner.Addr())
	key := importOf(t, p, far)
	for i := range announceMax {
		word(p.page, announceAt+uint64(i)*lineBytes).Store(1)
	}
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{{Len: 4096,
		LocalKey: near.Key(), RemoteKey: key}}}))
	require.ErrorIs(t, await(t, b, 1), driver.ErrPeerLost)
	<-p.Lost()
	require.NoError(t, p.Close())
}

// TestEmptyPlaces has a peer write places that carry nothing, without end: a call passes so many of
// them and no more.
func TestEmptyPlaces(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	p := dial(t, b, owner.Addr())
	for at := uint64(0); at < uint64(len(p.out.mem)); at += entryHead {
		word(p.out.mem, at).Store(entryWord(entrySkip, 0))
	}
	n, err := owner.Receive(make([]driver.Message, 8))
	require.NoError(t, err)
	require.Zero(t, n)
	require.EqualValues(t, emptyMax*entryHead, p.out.head.Load())
	ready, err := owner.Arm()
	require.NoError(t, err)
	require.True(t, ready, "there is more")
}

// TestArenaOutOfTable has a lying owner name an arena that its table has no generation of.
func TestArenaOutOfTable(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	_, far := shared(t, owner, 4096, 1)
	p := dial(t, b, owner.Addr())
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	g := far.grant()
	g.arena = owner.table.keys
	owner.table.publish(far.key, tagOf(&far.secret, far.key, &g), g)
	_, _, err = p.Import(token)
	require.ErrorIs(t, err, driver.ErrCorrupt)
}

// TestMappingsAreBounded has peers share more than this process may map: the memory is refused, and
// all is given back with the peer.
func TestMappingsAreBounded(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	_, far := shared(t, owner, 4096, 1)
	p := dial(t, b, owner.Addr())
	token, err := far.AppendToken(nil)
	require.NoError(t, err)
	for _, taken := range []struct {
		bytes   uint64
		extents int
	}{{mappedBytesMax, 0}, {0, mappedExtentsMax}} {
		require.NoError(t, b.mapped.take(taken.bytes, taken.extents))
		_, _, err = p.Import(token)
		require.ErrorIs(t, err, driver.ErrFull)
		b.mapped.give(taken.bytes, taken.extents)
	}
	importOf(t, p, far)
	require.Equal(t, 1, b.mapped.extents)
	require.NoError(t, p.Close())
	require.Zero(t, b.mapped.extents)
	require.Zero(t, b.mapped.bytes)
}

// TestOneProcessTakesHalfOfThePlaces: the others are for peers of other processes.
func TestOneProcessTakesHalfOfThePlaces(t *testing.T) {
	owner, b := open(t, Config{ConnsMax: 4}), open(t, Config{})
	dial(t, b, owner.Addr())
	dial(t, b, owner.Addr())
	_, err := b.Connect(t.Context(), owner.Addr())
	require.ErrorIs(t, err, driver.ErrFull)
	dial(t, owner, owner.Addr()) // itself
}

// TestAMomentWithoutDescriptors at the owner is no reason to give the memory up.
func TestAMomentWithoutDescriptors(t *testing.T) {
	err := statusError(statusOf(duplicateError(unix.EMFILE)))
	require.ErrorIs(t, err, driver.ErrFull)
	require.False(t, final(err))
	require.False(t, final(unix.ENOMEM))
	require.True(t, final(driver.ErrRevoked))
}

// TestConnectBesideClose: Close waits for a handshake under way, which it ends: our event goes to
// the peer while it is ours, and not as the number of another file.
func TestConnectBesideClose(t *testing.T) {
	b := open(t, Config{DialTimeout: time.Hour})
	silentOwner := newAddress("")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: silentOwner.socket(),
		Net: "unixpacket"})
	require.NoError(t, err)
	defer l.Close()
	connected := make(chan error, 1)
	go func() {
		_, err := b.Connect(context.Background(), silentOwner.encode())
		connected <- err
	}()
	conn, err := l.Accept()
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, b.Close())
	select {
	case err := <-connected:
		require.ErrorIs(t, err, driver.ErrClosed)
	case <-time.After(time.Minute):
		t.Fatal("Close has not ended Connect")
	}
	_, err = b.Connect(t.Context(), silentOwner.encode())
	require.ErrorIs(t, err, driver.ErrClosed)
}
