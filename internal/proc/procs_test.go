// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestMain lets the test binary be its own child.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && strings.HasPrefix(os.Args[1], "child-") {
		os.Exit(child(os.Args[1]))
	}
	os.Exit(m.Run())
}

func child(role string) int {
	c, err := Attach()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 3
	}
	switch role {
	case "child-echo":
		for m := range c.Messages() {
			c.Send(m.Kind, m.Body)
		}
		return 0
	case "child-fails":
		c.Send(KindError, "no luck")
		return 1
	case "child-stubborn":
		c.Send("ready", nil)
		sleep() // takes no notice of its parent
	case "child-parent":
		grandchild, err := StartChild("grandchild", []string{"child-stubborn"})
		if err != nil {
			return 1
		}
		<-grandchild.Messages()
		c.Send("grandchild", grandchild.PID)
		sleep()
	}
	return 4
}

// sleep never returns. A select without cases would be a deadlock to the runtime,
// once the goroutines of the control channel have ended.
func sleep() {
	for {
		time.Sleep(time.Hour)
	}
}

func start(t *testing.T, role string) *Child {
	t.Helper()
	c, err := StartChild("test", []string{role})
	require.NoError(t, err)
	t.Cleanup(func() {
		c.Stop(0)
		if alive(c.PID) {
			t.Errorf("process %d is left behind", c.PID)
		}
	})
	return c
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

func receive(t *testing.T, c *Child) (Message, bool) {
	t.Helper()
	select {
	case m, ok := <-c.Messages():
		return m, ok
	case <-time.After(10 * time.Second):
		t.Fatal("no message within 10 s")
	}
	return Message{}, false
}

func TestMessagesGoBothWays(t *testing.T) {
	c := start(t, "child-echo")
	for i := range 3 {
		require.NoError(t, c.Send("number", i))
		m, _ := receive(t, c)
		var got int
		if err := m.Decode(&got); err != nil || m.Kind != "number" || got != i {
			t.Errorf("echo of %d: %+v, %v", i, m, err)
		}
	}
	c.Stop(5 * time.Second)
	c.Stop(5 * time.Second)
	require.NoError(t, c.ExitError(), "a child that was asked to end")
}

func TestDeathIsNamed(t *testing.T) {
	c := start(t, "child-stubborn")
	receive(t, c)
	require.NoError(t, syscall.Kill(c.PID, syscall.SIGKILL))
	if _, ok := receive(t, c); ok {
		t.Error("a message of a dead child")
	}
	err := c.ExitError()
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("test process (pid %d) died: "+
		"signal: killed", c.PID)) {
		t.Errorf("exit error: %v", err)
	}
}

func TestFailureIsSaid(t *testing.T) {
	c := start(t, "child-fails")
	m, ok := receive(t, c)
	var why string
	if err := m.Decode(&why); !ok || m.Kind != KindError || err != nil || why != "no luck" {
		t.Errorf("message %+v, %v", m, err)
	}
	<-c.Exited()
	if c.ExitError() == nil {
		t.Error("exit status 1 is no error")
	}
}

func TestStubbornChildIsKilled(t *testing.T) {
	c := start(t, "child-stubborn")
	receive(t, c)
	c.Stop(50 * time.Millisecond)
	require.False(t, alive(c.PID), "still alive after Stop")
	require.NoError(t, c.ExitError(), "killed by Stop")
}

func TestTimedStoppedChildIsSilent(t *testing.T) {
	c := start(t, "child-stubborn")
	receive(t, c)
	require.NoError(t, syscall.Kill(c.PID, syscall.SIGSTOP))
	for start := time.Now(); c.Silent() < 2*AliveEvery; time.Sleep(10 * time.Millisecond) {
		if time.Since(start) > 10*time.Second {
			t.Fatal("a stopped child is heard")
		}
	}
	require.True(t, c.Stopped(), "not known to be stopped")
	require.NoError(t, syscall.Kill(c.PID, syscall.SIGCONT))
	for start := time.Now(); c.Silent() > AliveEvery; time.Sleep(10 * time.Millisecond) {
		if time.Since(start) > 10*time.Second {
			t.Fatal("a continued child is not heard")
		}
	}
	require.False(t, c.Stopped(), "taken for stopped")
}

func TestGrandchildEndsWithItsParent(t *testing.T) {
	c := start(t, "child-parent")
	m, _ := receive(t, c)
	var grandchild int
	if err := m.Decode(&grandchild); err != nil || !alive(grandchild) {
		t.Fatalf("grandchild %d, %v", grandchild, err)
	}
	require.NoError(t, syscall.Kill(c.PID, syscall.SIGKILL))
	for start := time.Now(); running(grandchild); time.Sleep(10 * time.Millisecond) {
		if time.Since(start) > time.Minute {
			t.Fatal("the grandchild outlives its parent")
		}
	}
}

// running reports whether a process runs: not gone, and not a zombie that
// nobody reaps (process 1 of a container may not).
func running(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, state, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(state, "Z")
}

func TestAttachNeedsAParent(t *testing.T) {
	if c, err := Attach(); err == nil {
		t.Errorf("attached: %+v", c)
	} else if errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "by sluice itself") {
		t.Errorf("error %v", err)
	}
}
