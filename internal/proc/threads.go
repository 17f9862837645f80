// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// Threads finds out whether a system call that a process may have begun before is over,
// although the process says nothing: it may be stopped, or frozen by a cgroup.
type Threads struct {
	dir  string
	call string
	left []string // the threads that have not been seen outside the call
}

// ThreadsOf lists the threads that may be in a call by now. What begins it later is not of
// interest. A process that /proc does not show, as one without a number here, is an error
// that wraps driver.ErrUnproven: that it is not shown does not prove that it has ended.
func ThreadsOf(pid int, call uintptr) (*Threads, error) {
	if pid <= 0 {
		return nil, fmt.Errorf("list the threads of a process of another PID namespace: %w",
			driver.ErrUnproven)
	}
	t := &Threads{dir: "/proc/" + strconv.Itoa(pid) + "/task/", call: strconv.Itoa(int(call))}
	dir, err := os.Open(t.dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list the threads of process %d, which /proc does not show: %w",
			pid, driver.ErrUnproven)
	}
	if err == nil {
		t.left, err = dir.Readdirnames(-1)
		_ = dir.Close() // only read
	}
	if err != nil {
		return nil, fmt.Errorf("list the threads of process %d: %w", pid, err)
	}
	return t, nil
}

// Out reports whether each of the threads was seen outside the call at least once. It does
// not wait: ask again after a while.
func (t *Threads) Out() bool {
	left := t.left[:0]
	for _, id := range t.left {
		if !t.out(id) {
			left = append(left, id)
		}
	}
	t.left = left
	return len(left) == 0
}

// out looks at one thread. One that is stopped, or waits to be collected, is in no call. Of
// others the kernel says which call they sleep in, if it lets us trace them; of one that
// runs it does not say.
func (t *Threads) out(id string) bool {
	stat, err := os.ReadFile(t.dir + id + "/stat")
	if err != nil {
		return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH)
	}
	_, state, _ := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" "))
	if len(state) > 0 && bytes.IndexByte([]byte("TtZX"), state[0]) >= 0 {
		return true
	}
	text, err := os.ReadFile(t.dir + id + "/syscall")
	if err != nil {
		return false
	}
	call, _, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
	if call == t.call {
		return t.frozen(id)
	}
	return call != "running"
}

// frozen reports whether a cgroup has frozen a thread behind its call: it takes signals, as it does
// on the way back to the program, while /proc still names the call. Version 2 freezes there alone.
// Version 1 does, too, or leaves a thread where it sleeps; before Linux 6.1 such a sleep shows the
// same name, and proves nothing.
func (t *Threads) frozen(id string) bool {
	where, err := os.ReadFile(t.dir + id + "/wchan")
	if err != nil {
		return false
	}
	switch string(where) {
	case "get_signal", "do_freezer_trap":
		return true
	case "__refrigerator":
		return freezesInPlace()
	}
	return false
}

// freezesInPlace reports whether this is Linux 6.1 or newer.
var freezesInPlace = sync.OnceValue(func() bool {
	var name unix.Utsname
	var major, minor int
	if unix.Uname(&name) != nil {
		return false
	}
	_, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor)
	return err == nil && (major > 6 || major == 6 && minor >= 1)
})
