// SPDX-License-Identifier: Apache-2.0

package lobby

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// connection notes that it was closed.
type connection struct{ closed bool }

func (c *connection) Close() error {
	c.closed = true
	return nil
}

// TestAdmit closes the connection that has been unknown for longest, after it has had its
// time, and no other.
func TestAdmit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Lobby{Most: 3}
		conns := make([]connection, 6)
		for i := range 3 {
			require.True(t, l.Admit(&conns[i]))
			time.Sleep(time.Millisecond)
		}
		require.True(t, l.Keep(&conns[0]))
		require.False(t, l.Admit(&conns[3]), "all of them are new")
		time.Sleep(Least)
		require.True(t, l.Admit(&conns[3]))
		require.Equal(t, []connection{{}, {closed: true}, {}, {}, {}, {}}, conns)
		require.False(t, l.Keep(&conns[1]))
		require.False(t, l.Leave(&conns[1]))

		require.True(t, l.Leave(&conns[0]))
		require.False(t, l.Leave(&conns[0]))
		require.True(t, l.Admit(&conns[4]), "into the place that is free")
		require.True(t, l.Admit(&conns[5]))
		require.True(t, conns[2].closed)
		require.False(t, conns[3].closed || conns[4].closed)
	})
}

// TestAllKnown closes none that waits to be served.
func TestAllKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Lobby{Most: 1}
		conns := make([]connection, 2)
		require.True(t, l.Admit(&conns[0]))
		require.True(t, l.Keep(&conns[0]))
		time.Sleep(time.Hour)
		require.False(t, l.Admit(&conns[1]))
		require.False(t, conns[0].closed)
	})
}
