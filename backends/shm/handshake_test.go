// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

func rawDial(t *testing.T, b *Backend) *net.UnixConn {
	t.Helper()
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: b.address.socket(),
		Net: "unixpacket"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// hello is a greeting of a peer with these descriptors and this ring.
func hello(b *Backend, ring uint64) []byte {
	return append(binary.LittleEndian.AppendUint64([]byte{msgHello, version}, ring), b.addr...)
}

// Other programs send anything, or nothing: they are hung up on, and a peer is
// served all the same.
func TestGarbageInsteadOfAHelloIsHungUpOn(t *testing.T) {
	b := open(t, Config{DialTimeout: 2 * time.Second})
	page, _, err := hostmem.NewSealed("test", connectionBytes(ringBytesMin), false)
	require.NoError(t, err)
	small, _, err := hostmem.NewSealed("test", pageBytes, false)
	require.NoError(t, err)
	soft, err := unix.MemfdCreate("test", unix.MFD_ALLOW_SEALING) // right size, may shrink
	require.NoError(t, err)
	require.NoError(t, unix.Ftruncate(soft, int64(connectionBytes(ringBytesMin))))
	blocking, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	require.NoError(t, err)
	defer closeAll([]int{page, small, soft, blocking})
	good := hello(b, ringBytesMin)
	cases := []struct {
		name string
		msg  []byte
		fds  []int
	}{
		{"nothing", nil, nil},
		{"one byte", []byte{0}, nil},
		{"another kind", []byte{msgFetch, 1, 2, 3}, nil},
		{"no descriptors", good, nil},
		{"one descriptor", good, []int{page}},
		{"many descriptors", good, []int{page, page, page, page, page}},
		{"event is a memfd", good, []int{page, page}},
		{"event that blocks", good, []int{page, blocking}},
		{"page too short", good, []int{small, b.event}},
		{"page can shrink", good, []int{soft, b.event}},
		{"page without magic", good, []int{page, b.event}},
		{"wild ring", hello(b, 1<<60), []int{page, b.event}},
		{"another version", append([]byte{msgHello, version + 1}, good[2:]...),
			[]int{page, b.event}},
		{"no address", good[:10], []int{page, b.event}},
	}
	for _, c := range cases {
		conn := rawDial(t, b)
		if c.msg != nil {
			err := send(conn, limit, c.msg, c.fds)
			if err != nil && !errors.Is(err, unix.EPIPE) { // hung up on before we came to it
				t.Fatal(err)
			}
		}
		expectHangUp(t, c.name, conn)
	}
	p := dial(t, b, b.Addr())
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// expectHangUp reads until the end; a refusal may come first.
func expectHangUp(t *testing.T, name string, conn *net.UnixConn) {
	t.Helper()
	_ = conn.SetReadDeadline(time.Now().Add(limit))
	var buf [64]byte
	for {
		n, err := conn.Read(buf[:])
		var late net.Error
		if errors.As(err, &late) && late.Timeout() {
			t.Errorf("%s: still connected", name)
			return
		}
		if err != nil || n == 0 {
			return
		}
		if n < 3 || buf[0] != msgWelcome || buf[2] == byte(statusOK) {
			t.Errorf("%s: answered %v, want a refusal", name, buf[:n])
			return
		}
	}
}

// TestManySilentConnectionsKeepNoPeerOut though each may keep its place for an hour otherwise.
func TestManySilentConnectionsKeepNoPeerOut(t *testing.T) {
	b := open(t, Config{DialTimeout: time.Hour})
	for range 2 * handshakesMax {
		rawDial(t, b)
	}
	other := open(t, Config{})
	_ = dial(t, other, b.Addr()).Close()
}

// A peer writes anything into the ring: its connection ends, with the word that
// it is lost, and nothing else happens.
func TestGarbageInTheRingEndsTheConnection(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	b := open(t, Config{})
	words := []uint64{entryWord(entryData, messageMax+1), entryWord(entryData, 1<<56-1),
		entryWord(9, 8),
		entryWord(entryPad, 0), entryWord(entryPad, 1), entryWord(entrySkip, 1<<40), ^uint64(0)}
	for range 40 {
		words = append(words, rng.Uint64()|1<<63)
	}
	for _, w := range words {
		p := dial(t, b, b.Addr())
		require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail,
			Notify: []byte("fine")}))
		require.NoError(t, await(t, b, 1))
		word(p.out.mem, p.out.tail).Store(w)
		msgs := receive(t, b, 2)
		if string(msgs[0].Data) != "fine" || !errors.Is(msgs[1].Err, driver.ErrPeerLost) {
			t.Fatalf("word %#x: received %v, want the message and a lost peer", w, msgs)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}

func receive(t *testing.T, b *Backend, want int) []driver.Message {
	t.Helper()
	var got []driver.Message
	var buf [8]driver.Message
	for end := time.Now().Add(limit); len(got) < want &&
		time.Now().Before(end); time.Sleep(50 * time.Microsecond) {
		n, err := b.Receive(buf[:])
		require.NoError(t, err)
		got = append(got, buf[:n]...)
	}
	if len(got) != want {
		t.Fatalf("received %v, want %d messages", got, want)
	}
	return got
}

// A wild head makes the ring look full to the sender, never larger.
func TestGarbageInTheHeadIsAFullRing(t *testing.T) {
	b := open(t, Config{})
	p := dial(t, b, b.Addr())
	for _, head := range []uint64{1, 1 << 40, 1 << 63} {
		p.out.head.Store(head)
		err := p.Submit(1, &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail,
			Notify: make([]byte, messageMax)})
		wantError(t, "notify over a wild head", err, driver.ErrFull)
	}
}

func TestOtherUsersAreRefused(t *testing.T) {
	if os.Getuid() != 0 {
		t.Log("not root: the refusal of another user is not exercised")
		return
	}
	o := startOwner(t, "shared", 65534)
	b := open(t, Config{})
	_, err := b.Connect(context.Background(), o.addr)
	wantError(t, "connect to another user's backend", err, os.ErrPermission)
	a, err := decodeAddress(o.addr)
	require.NoError(t, err)
	a.uid = 0 // an address that lies: the kernel does not
	_, err = b.Connect(context.Background(), a.encode())
	wantError(t, "connect to another user's backend by a forged address", err, os.ErrPermission)
}
