// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// Of goroutines that look at once each is told of its own socket, whichever of them asks.
func TestLooksAreToldOfTheirOwn(t *testing.T) {
	var k looks
	var all sync.WaitGroup
	for i := range 4 {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		require.NoError(t, err)
		t.Cleanup(func() { _, _ = unix.Close(pair[0]), unix.Close(pair[1]) })
		comes := i%2 == 0
		if comes {
			_, err = unix.Write(pair[1], []byte("x"))
			require.NoError(t, err)
		}
		all.Go(func() {
			for l, round := (&look{}), 0; round < 200; round++ {
				if k.wait(l, pair[0]) != comes {
					t.Errorf("socket %d has bytes: %v, and it was told otherwise", i, comes)
				}
			}
		})
	}
	all.Wait()
	require.Empty(t, k.list)
}

// Who looks in vain again and again does so ever less often, and again once it was worth it.
func TestLooksInVainGetRare(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer func() { _, _ = unix.Close(pair[0]), unix.Close(pair[1]) }()
	c := &conn{b: &Backend{}, index: express}
	c.in.readIdle = true
	for range 1000 {
		require.False(t, c.look(pair[0]))
	}
	l := &c.in.look
	require.Equal(t, restsShift, l.misses)
	_, err = unix.Write(pair[1], []byte("x"))
	require.NoError(t, err)
	for range l.rests {
		require.False(t, c.look(pair[0]), "a look before its time")
	}
	require.True(t, c.look(pair[0]))
	require.True(t, c.look(pair[0]), "a rest after bytes that came")
	c.in.readIdle = false
	require.False(t, c.look(pair[0]), "a look within a frame")
}

// The goroutine that has read a message from the socket calls what the program has given to Reap.
func TestMessagesAreHandedOver(t *testing.T) {
	owner, initiator := open(t, Config{}), open(t, Config{})
	came := make(chan string, 1)
	owner.Reap(func() bool {
		var msgs [1]driver.Message
		if n, _ := owner.Receive(msgs[:]); n == 1 {
			came <- string(msgs[0].Data)
		}
		return false
	})
	ready, err := owner.Arm()
	require.NoError(t, err)
	require.False(t, ready)
	notify(t, dial(t, initiator, owner.Addr()), "x")
	select {
	case text := <-came:
		require.Equal(t, "x", text)
	case <-time.After(limit):
		require.Fail(t, "nobody receives the message")
	}
	wake := []unix.PollFd{{Fd: int32(owner.FD()), Events: unix.POLLIN}}
	n, err := unix.Poll(wake, 0)
	require.NoError(t, err)
	require.Zero(t, n, "another goroutine is woken for it")
}

// Records of TLS that the socket does not take stay for the next flush, and no writer waits.
func TestRecordsWaitForTheSocket(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	near, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer near.Close()
	far, err := l.Accept()
	require.NoError(t, err)
	defer far.Close()
	tcp := near.(*net.TCPConn)
	raw, err := tcp.SyscallConn()
	require.NoError(t, err)
	r := &records{TCPConn: tcp, b: &Backend{}}
	r.keep(&conn{raw: raw})
	var sent bytes.Buffer
	flush := func() (err error) {
		require.NoError(t, raw.Write(func(fd uintptr) bool { err = r.flush(int(fd)); return true }))
		return err
	}
	for i := 0; ; i++ {
		record := bytes.Repeat([]byte{byte(i)}, 16<<10)
		sent.Write(record)
		_, err := r.Write(record)
		require.NoError(t, err)
		if err := flush(); err != nil {
			require.Equal(t, unix.EAGAIN, err)
			break
		}
	}
	require.True(t, r.wait())
	for err = nil; err == nil; { // records that the peer does not read are bounded
		if _, err = r.Write(make([]byte, 1<<10)); err == nil {
			sent.Write(make([]byte, 1<<10))
		}
	}
	require.ErrorIs(t, err, driver.ErrCorrupt)
	_, err = r.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF, "its reading goroutine does not learn of it")

	got := make([]byte, sent.Len())
	require.NoError(t, far.SetDeadline(time.Now().Add(time.Minute)))
	var all sync.WaitGroup
	all.Go(func() { _, err = io.ReadFull(far, got) })
	require.NoError(t, raw.Write(func(fd uintptr) bool { return r.flush(int(fd)) == nil }))
	all.Wait()
	require.NoError(t, err)
	require.True(t, bytes.Equal(sent.Bytes(), got))
}
