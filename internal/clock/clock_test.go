// SPDX-License-Identifier: Apache-2.0

package clock

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHost(t *testing.T) {
	c := Host()
	begin := c.Now()
	require.GreaterOrEqual(t, begin, int64(time.Hour))
	over, timer := After(c, time.Millisecond)
	<-over
	require.False(t, timer.Stop())
	c.Sleep(time.Millisecond)
	require.GreaterOrEqual(t, c.Now()-begin, int64(2*time.Millisecond))
	over, timer = After(c, time.Hour)
	require.True(t, timer.Stop())
	select {
	case <-over:
		t.Error("a timer that was stopped has ended")
	default:
	}
}
