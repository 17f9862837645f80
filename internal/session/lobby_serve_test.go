// SPDX-License-Identifier: Apache-2.0

package session

import (
	"net"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/clock"
)

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
		time.Sleep(breath)
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
			time.Sleep(breath)
			synctest.Wait()
		}
		require.Empty(t, from.next)
		from.next <- os.ErrPermission
		require.ErrorIs(t, <-ended, os.ErrPermission)
	})
}
