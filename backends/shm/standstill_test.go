// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bufio"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver/drivertest"
)

// closingOwner makes the test binary an owner that closes its memory; its Grace follows.
const closingOwner = "closing "

// serveClose waits for a line, says that it begins to close its memory, and says how that ended.
func serveClose(grace string) int {
	if err := closeOnce(grace); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func closeOnce(grace string) error {
	patient, err := time.ParseDuration(grace)
	if err != nil {
		return err
	}
	space, err := drivertest.ForeignMemory(heldBytes)
	if err != nil {
		return err
	}
	b, m, err := offer(Config{Grace: patient}, space)
	if err != nil {
		return err
	}
	in := bufio.NewReader(os.Stdin)
	if _, err := in.ReadString('\n'); err != nil {
		return b.Close()
	}
	fmt.Println("closing")
	fmt.Println(m.Close())
	return b.Close()
}

// TestTimedCloseOfAnOwnerThatStoodStill: an owner that is not run while its Close waits for a
// writer has not waited for that writer.
func TestTimedCloseOfAnOwnerThatStoodStill(t *testing.T) {
	// A machine that is so busy that the owner is frozen late leaves it no time: then with a longer
	// Grace.
	for grace := 200 * time.Millisecond; !closesAfterAStandstill(t, grace); grace *= 2 {
		require.Less(t, grace, 4*time.Second, "the owner is frozen too late")
	}
}

// closesAfterAStandstill reports false where the owner may have run for all the time that its Close
// has.
func closesAfterAStandstill(t *testing.T, grace time.Duration) bool {
	t.Helper()
	o := startOwner(t, closingOwner+grace.String(), 0)
	b := open(t, Config{})
	source, ended := heldUp(t, b, o.addr, o.token)
	begin := time.Now()
	fmt.Fprintln(o.in)
	line, err := o.out.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "closing\n", line)
	time.Sleep(grace + grace/4) // it has taken the gate away
	o.freeze(t)
	ran := time.Since(begin)
	time.Sleep(2 * grace)
	begin = time.Now()
	o.thaw(t)
	time.Sleep(grace / 8) // it looks at the writer some more times
	source.Supply(t)
	require.NoError(t, ended())
	ran += time.Since(begin)
	line, err = o.out.ReadString('\n')
	require.NoError(t, err)
	if ran > grace*7/4 {
		return false
	}
	require.Equal(t, fmt.Sprintln(nil), line)
	return true
}
