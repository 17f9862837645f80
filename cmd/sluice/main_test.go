// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/machine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// binary is the command under test, built once.
var binary string

// asCommand makes the test binary the command itself.
const asCommand = "SLUICE_TEST_AS_COMMAND"

// builtBinary names the command for a process that runs a test once more.
const builtBinary = "SLUICE_TEST_BINARY"

func TestMain(m *testing.M) {
	if setup := os.Getenv(asClient); setup != "" {
		if err := runTraceClient(setup); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if os.Getenv(asCommand) != "" {
		main()
		return
	}
	os.Exit(buildAndRun(m))
}

func buildAndRun(m *testing.M) int {
	if machine.InGuest() { // where there is no compiler
		binary = os.Args[0]
		os.Setenv(asCommand, "1")
		return m.Run()
	}
	if binary = os.Getenv(builtBinary); binary != "" {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "sluice-test-*")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "sluice")
	build := exec.Command("go", "build", "-o", binary, ".")
	build.Env = append(os.Environ(), "GOFLAGS=-trimpath -buildvcs=false")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the command: %v\n%s", err, out)
		return 1
	}
	os.Setenv(builtBinary, binary)
	return m.Run()
}

// outcome is what a finished command leaves.
type outcome struct {
	status         int
	stdout, stderr string
}

// commandLimit bounds every command of these tests.
const commandLimit = 180 * time.Second

// answerLimit is --timeout where a replay is to find out that a process does not answer, and where
// processes that are well must not be taken for such: those of a busy machine answer late.
const answerLimit = 10 * time.Second

// noticed bounds how long a command takes to end for a reason that it finds out within
// answerLimit or a few seconds. It is below the limits of the tool itself, and below the time that
// the commands of these tests take.
const noticed = 28 * time.Second

// command prepares one that is killed at the limit, with a temporary directory of
// its own that must be empty afterwards.
func command(t *testing.T, args ...string) (*exec.Cmd, *bytes.Buffer, *bytes.Buffer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	t.Cleanup(cancel)
	c := exec.CommandContext(ctx, binary, args...)
	c.WaitDelay = 5 * time.Second // its children hold its pipes, too
	tmp := t.TempDir()
	c.Env = append(os.Environ(), "TMPDIR="+tmp)
	c.Dir = tmp
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	t.Cleanup(func() {
		if left, _ := os.ReadDir(tmp); len(left) > 0 {
			t.Errorf("%v leaves %v behind", args, left)
		}
	})
	return c, &stdout, &stderr
}

func sluice(t *testing.T, args ...string) outcome {
	t.Helper()
	c, stdout, stderr := command(t, args...)
	err := c.Run()
	return outcome{status(t, err), stdout.String(), withoutProgress(stderr)}
}

// A pipe reads of progress every sayEvery: how often depends on the machine.
var progressLine = regexp.MustCompile(`(?m)^.*: \d+ % done.*\n`)

func withoutProgress(stderr *bytes.Buffer) string {
	return progressLine.ReplaceAllString(stderr.String(), "")
}

// ok wants a command to have succeeded.
func ok(t *testing.T, o outcome) outcome {
	t.Helper()
	require.Zero(t, o.status, "%+v", o)
	return o
}

func status(t *testing.T, err error) int {
	t.Helper()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	}
	t.Fatal(err)
	return 0
}

// decode reads JSON, and fails unless it is all that was printed.
func decode(t *testing.T, text string) any {
	t.Helper()
	var v any
	d := json.NewDecoder(strings.NewReader(text))
	require.NoError(t, d.Decode(&v), "in:\n%s", text)
	require.False(t, d.More(), "more than one value:\n%s", text)
	return v
}

// wantKeys compares the keys of a JSON object; a missing one breaks programs
// that read it, and a new one belongs in this list.
func wantKeys(t *testing.T, what string, v any, keys ...string) {
	t.Helper()
	object, ok := v.(map[string]any)
	require.True(t, ok, "%s is %T", what, v)
	slices.Sort(keys)
	if got := slices.Sorted(maps.Keys(object)); !slices.Equal(got, keys) {
		t.Errorf("%s has the keys\n%v, want\n%v", what, got, keys)
	}
}

// childrenOf lists the processes whose parent is pid.
func childrenOf(pid int) (list []int) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, p := range stats {
		b, err := os.ReadFile(p)
		if err != nil {
			continue
		}
		var child, parent int
		var state string
		_, rest, _ := bytes.Cut(b, []byte(") "))
		fmt.Sscanf(string(rest), "%s %d", &state, &parent)
		fmt.Sscanf(filepath.Base(filepath.Dir(p)), "%d", &child)
		if parent == pid && state != "Z" {
			list = append(list, child)
		}
	}
	return list
}

// awaitChildren waits until the process has that many.
func awaitChildren(t *testing.T, pid, n int) []int {
	t.Helper()
	for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(5 * time.Millisecond) {
		if list := childrenOf(pid); len(list) == n {
			return list
		}
	}
	t.Fatalf("process %d has children %v, want %d", pid, childrenOf(pid), n)
	return nil
}

// readProc returns a file of a process, "" when it is gone.
func readProc(pid int, name string) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	return string(b)
}

// running reports whether a process is there and no zombie.
func running(pid int) bool {
	_, state, ok := strings.Cut(readProc(pid, "stat"), ") ")
	return ok && !strings.HasPrefix(state, "Z")
}

func wantGone(t *testing.T, pids []int) {
	t.Helper()
	for _, pid := range pids {
		if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
			testkit.ErrorBroken(t, "child %d is left behind: %v", pid, err)
		}
	}
}
