// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/hostmem"
)

// patienceOfTests passes soon, where something is left behind.
const patienceOfTests = 100 * time.Millisecond

// recorder stands for a test that may fail.
type recorder struct {
	testing.TB
	cleanups []func()
	failure  string
}

func (r *recorder) Helper()          {}
func (r *recorder) Cleanup(f func()) { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Errorf(format string, args ...any) {
	r.failure = fmt.Sprintf(format, args...)
}

// end runs the cleanups, last first, and returns what the test was failed for.
func (r *recorder) end() string {
	for i := len(r.cleanups) - 1; i >= 0; i-- {
		r.cleanups[i]()
	}
	return r.failure
}

func TestCheckLeaksNamesWhatIsLeft(t *testing.T) {
	release := make(chan struct{})
	var wg sync.WaitGroup
	live := uint64(0)
	cases := []struct {
		name  string
		leak  func() (undo func())
		names string // in the message
	}{
		{"descriptor", func() func() {
			f, err := os.Open("/dev/zero")
			if err != nil {
				t.Fatal(err)
			}
			return func() { _ = f.Close() }
		}, "/dev/zero"},
		{"goroutine", func() func() {
			started := make(chan struct{})
			wg.Go(func() { waitForever(started, release) })
			<-started // its stack shows the function
			return func() { close(release); wg.Wait() }
		}, "testkit.waitForever"},
		{"memory", func() func() {
			b, err := hostmem.Alloc(1, hostmem.Options{Purpose: "forgotten"})
			if err != nil {
				t.Fatal(err)
			}
			return func() { _ = b.Close() }
		}, "bytes of hostmem for forgotten: "},
		{"count", func() func() { live++; return func() { live-- } }, "widgets: 1"},
	}
	warmUp()
	for _, c := range cases {
		also := []func() map[string]uint64{func() map[string]uint64 {
			return map[string]uint64{"widgets": live}
		}}
		before := newSnapshot(also, true)
		undo := c.leak()
		grown := strings.Join(settle(before, also, true, 20*time.Millisecond), "\n")
		require.True(t, strings.Contains(grown, c.names), "%s: the message does not name %q:\n%s",
			c.name, c.names, grown)
		undo()
		if grown := settle(before, also, true, patience); len(grown) > 0 {
			t.Errorf("%s: reported after it was undone:\n%s", c.name, strings.Join(grown, "\n"))
		}
	}
}

// TestASecondCheckOfATestLeavesGoroutinesToTheFirst: what the test has started by then may start
// more at any time, and ends with the test.
func TestASecondCheckOfATestLeavesGoroutinesToTheFirst(t *testing.T) {
	for _, ends := range []bool{true, false} {
		r := &recorder{TB: t}
		checkLeaks(r, patienceOfTests, nil)
		release, started := make(chan struct{}), make(chan struct{})
		var wg sync.WaitGroup
		if ends {
			r.Cleanup(func() { close(release); wg.Wait() })
		}
		CheckLeaks(r)
		wg.Go(func() { waitForever(started, release) })
		<-started
		require.Equal(t, ends, r.end() == "", r.failure)
		if !ends {
			require.Contains(t, r.failure, "testkit.waitForever")
			close(release)
			wg.Wait()
		}
	}
}

func waitForever(started chan<- struct{}, release <-chan struct{}) {
	close(started)
	<-release
}
