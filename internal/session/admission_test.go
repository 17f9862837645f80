// SPDX-License-Identifier: Apache-2.0

package session

import (
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/clock"
)

// connection notes that it was closed.
type silentConnection struct {
	net.Conn
	from string
	mu   sync.Mutex
	shut bool
}

func (c *silentConnection) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shut = true
	return nil
}

func (c *silentConnection) closed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.shut
}

func (c *silentConnection) RemoteAddr() net.Addr {
	return &net.TCPAddr{IP: net.ParseIP(c.from), Port: 1} // "" is no address
}

// arrive has a connection of a host arrive.
func arrive(l *Lobby, from string) (*silentConnection, *Visit) {
	c := &silentConnection{from: from}
	return c, l.Arrive(c)
}

// in reports whether a connection has a place.
func in(v *Visit) bool {
	select {
	case <-v.ready:
		return v.Show(ShownNothing)
	default:
		return false
	}
}

// beats is a clock that fires when a test says so. What time it is it does not know.
type beats struct{ due []func() }

func (b *beats) Now() int64          { panic("a Lobby that looks at the time counts standstill") }
func (b *beats) Sleep(time.Duration) { panic("not used") }
func (b *beats) AfterFunc(_ time.Duration, f func()) clock.Timer {
	b.due = append(b.due, f)
	return time.NewTimer(time.Hour)
}

// pass fires n times.
func (b *beats) pass(n int) {
	for range n {
		due := b.due
		b.due = nil
		for _, f := range due {
			f()
		}
	}
}

// TestPlacesOfTheSilent go to those that wait, after HandshakeMin: of those that have shown least,
// the oldest first. One that is known keeps its place.
func TestPlacesOfTheSilent(t *testing.T) {
	b := &beats{}
	l := NewLobby(4, b)
	var conns []*silentConnection
	var visits []*Visit
	come := func() *Visit {
		c, v := arrive(l, "")
		require.NotNil(t, v)
		conns, visits = append(conns, c), append(visits, v)
		return v
	}
	for range 4 {
		require.True(t, in(come()))
	}
	require.True(t, visits[0].Show(ShownAll))
	require.True(t, visits[1].Show(ShownIdentity))
	require.Empty(t, b.due, "none waits")
	for range 3 {
		require.False(t, in(come()))
	}
	b.pass(leastBeats - 1)
	for _, c := range conns {
		require.False(t, c.closed())
	}
	b.pass(1) // as many beats whatever time passes between
	for i, want := range []bool{false, true, true, true, false, false, false} {
		require.Equal(t, want, conns[i].closed(), i)
	}
	for i, want := range []bool{true, false, false, false, true, true, true} {
		require.Equal(t, want, in(visits[i]), i)
	}
	require.False(t, visits[2].Leave())
	come()
	require.True(t, visits[4].Leave())
	require.False(t, visits[4].Leave())
	require.True(t, in(visits[7]), "into the place that is free")
	b.pass(1)
	require.Empty(t, b.due, "none waits any more")
}

// TestLowestRankGoesFirst also where it is younger.
func TestLowestRankGoesFirst(t *testing.T) {
	b := &beats{}
	l := NewLobby(2, b)
	older, v := arrive(l, "")
	require.True(t, v.Show(ShownIdentity))
	younger, _ := arrive(l, "")
	_, next := arrive(l, "")
	b.pass(leastBeats)
	require.True(t, younger.closed() && in(next))
	require.False(t, older.closed())
}

// TestOneHostHasHalf of the places and of the queue, whatever it has shown and as many addresses as
// it has of an IPv6 network: another host gets in at once, and before it.
func TestOneHostHasHalf(t *testing.T) {
	for name, address := range map[string]func(int) string{
		"IPv4":        func(int) string { return "10.0.0.1" },
		"IPv6":        func(i int) string { return fmt.Sprintf("2001:db8:0:1::%x", i+1) },
		"IPv4 mapped": func(i int) string { return []string{"10.0.0.1", "::ffff:10.0.0.1"}[i%2] },
	} {
		t.Run(name, func(t *testing.T) {
			b := &beats{}
			l := NewLobby(64, b)
			var waiting []*Visit
			for i := range 32 + l.waiting.Most/2 {
				_, v := arrive(l, address(i))
				require.NotNil(t, v)
				require.Equal(t, i < 32, in(v))
				if i < 32 {
					require.True(t, v.Show(ShownAll))
				} else {
					waiting = append(waiting, v)
				}
			}
			_, v := arrive(l, address(0))
			require.Nil(t, v)
			for range 32 {
				_, v = arrive(l, "2001:db8:0:2::1")
				require.True(t, in(v), "another host is shut out by one")
			}
			b.pass(leastBeats)
			require.False(t, in(waiting[0]), "a host has more than half of the places")
			require.True(t, v.Leave())
			require.False(t, in(waiting[0]))
		})
	}
}

// TestOwnPlaces: a host that has its share waits for its own places.
func TestOwnPlaces(t *testing.T) {
	b := &beats{}
	l := NewLobby(4, b)
	other, _ := arrive(l, "10.0.0.2")
	first, _ := arrive(l, "10.0.0.1")
	second, _ := arrive(l, "10.0.0.1")
	_, v := arrive(l, "10.0.0.1")
	b.pass(leastBeats)
	require.True(t, first.closed() && in(v))
	require.False(t, other.closed() || second.closed())
}

// TestFullQueue: where all that may wait do, one of the host of which most wait goes.
func TestFullQueue(t *testing.T) {
	l := NewLobby(1, &beats{})
	_, v := arrive(l, "10.9.9.9")
	require.True(t, in(v))
	full := func(host string, n int) (last *silentConnection, v *Visit) {
		for range n {
			last, v = arrive(l, host)
			require.NotNil(t, v)
		}
		return last, v
	}
	most := l.waiting.Most
	full("10.0.0.1", most/2-1)
	last, lastVisit := full("10.0.0.2", most/2)
	full("10.0.0.3", 2)
	require.True(t, last.closed())
	require.False(t, lastVisit.Wait())
	require.False(t, lastVisit.Leave())
	for range most {
		arrive(l, "10.0.0.3")
	}
	require.LessOrEqual(t, len(l.queue), most)
	require.InDelta(t, most/3, l.waiting.of[HostOf(&silentConnection{from: "10.0.0.3"})], 1)
}

// TestClose closes all, and wakes those that wait.
func TestClose(t *testing.T) {
	l := NewLobby(1, clock.Host())
	c, v := arrive(l, "")
	require.True(t, v.Wait())
	d, w := arrive(l, "")
	ended := make(chan bool)
	go func() { ended <- w.Wait() }()
	l.Close()
	require.False(t, <-ended)
	require.True(t, c.closed() && d.closed())
	require.False(t, v.Leave())
	_, none := arrive(l, "")
	require.Nil(t, none)
}

// TestHostOf: addresses of one IPv6 network are one host, and an IPv4 address is the same in both
// forms.
func TestHostOf(t *testing.T) {
	of := func(ip string) Host { return HostOf(&silentConnection{from: ip}) }
	require.Equal(t, of("2001:db8::1"), of("2001:db8::2"))
	require.NotEqual(t, of("2001:db8::1"), of("2001:db8:0:1::1"))
	require.NotEqual(t, of("10.0.0.1"), of("10.0.0.2"))
	require.Equal(t, of("10.0.0.1"), of("::ffff:10.0.0.1"))
	require.Equal(t, Host{}, of(""))
	end, other := net.Pipe()
	require.Equal(t, Host{}, HostOf(end))
	require.NoError(t, end.Close())
	require.NoError(t, other.Close())
}

// listener accepts what a test gives it.
type listener struct {
	net.Listener
	next chan any
}

func (l listener) Accept() (net.Conn, error) {
	switch v := (<-l.next).(type) {
	case error:
		return nil, v
	case net.Conn:
		return v, nil
	}
	return nil, net.ErrClosed
}

// TestServe goes on while the kernel has no descriptors, closes what may not wait, lets those
// without an address wait in the kernel, and ends as the listener does.
func TestServe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, from := NewLobby(1, clock.Host()), listener{next: make(chan any, 1<<10)}
		started, ended := 0, make(chan error)
		go func() {
			ended <- l.Serve(from, func(_ net.Conn, v *Visit) bool {
				started++
				return started != 3
			})
		}()
		from.next <- &os.SyscallError{Syscall: "accept4", Err: syscall.EMFILE}
		var conns []*silentConnection
		come := func(n int, host string) {
			for range n {
				conns = append(conns, &silentConnection{from: host})
				from.next <- conns[len(conns)-1]
			}
		}
		come(3, "10.0.0.1")
		time.Sleep(acceptPause)
		synctest.Wait()
		require.True(t, conns[2].closed(), "it could not be started")
		most := l.waiting.Most
		come(most/2, "10.0.0.1")
		synctest.Wait()
		require.True(t, conns[len(conns)-1].closed(), "too many of its host wait")
		come(most, "")
		synctest.Wait()
		require.NotEmpty(t, from.next, "not all of them may wait")
		for range len(conns) { // each leaves, but for those of a host that were closed
			l.mu.Lock()
			if len(l.in) == 0 {
				l.mu.Unlock()
				break
			}
			v := l.in[0]
			l.mu.Unlock()
			require.True(t, v.Leave())
			time.Sleep(acceptPause)
			synctest.Wait()
		}
		require.Empty(t, from.next)
		from.next <- os.ErrPermission
		require.ErrorIs(t, <-ended, os.ErrPermission)
	})
}

func TestHungUp(t *testing.T) {
	for _, err := range []error{io.EOF, syscall.ECONNRESET} {
		require.True(t, HungUp(fmt.Errorf("read: %w", err)))
	}
	require.False(t, HungUp(syscall.ECONNREFUSED))
}
