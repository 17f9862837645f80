// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// modeVariable makes the test binary a driver that behaves in some way.
const modeVariable = "PEERS_TEST_DRIVER"

func TestMain(m *testing.M) {
	mode := os.Getenv(modeVariable)
	if mode == "" {
		os.Exit(m.Run())
	}
	if err := fakeDriver(mode); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(3)
	}
	os.Exit(0)
}

func fakeDriver(mode string) error {
	say := func(text string) { os.NewFile(answersFD, "answers").WriteString(text) }
	switch mode {
	case "dies":
		fmt.Println("library: no such device")
		os.Exit(7)
	case "hangs":
		hang()
	case "garbage":
		say("Warning: this is no answer\n")
		hang()
	case "endless":
		say(strings.Repeat("x", answerMax+1))
		hang()
	case "wrong":
		say(`{"id": 99}` + "\n")
		hang()
	}
	return Serve(&fakeEnd{mode: mode})
}

// fakeEnd moves bytes by a memory that the initiator maps.
type fakeEnd struct {
	mode          string
	memory, other []byte
	pid           int
}

type fakeCard struct {
	PID, FD int
	Bytes   int
}

func (e *fakeEnd) Open(r *Request) (Answer, error) {
	if e.mode == "unsupported" {
		return Answer{}, fmt.Errorf("no library: %w", ErrUnsupported)
	}
	fd, err := unix.MemfdCreate("fake", 0)
	if err != nil {
		return Answer{}, err
	}
	whole := int(r.Bytes) + noteBytes
	if err := unix.Ftruncate(fd, int64(whole)); err != nil {
		return Answer{}, err
	}
	e.memory, err = unix.Mmap(fd, 0, whole, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	card, _ := json.Marshal(fakeCard{os.Getpid(), fd, whole})
	return Answer{Version: "fake 1", Settings: e.mode, Card: string(card)}, err
}

func (e *fakeEnd) Memory() []byte { return e.memory[:max(len(e.memory), noteBytes)-noteBytes] }

// noteBytes lie behind the memory: the last of them counts messages.
const noteBytes = 8

func (e *fakeEnd) Connect(text string) error {
	var c fakeCard
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return err
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/%d", c.PID, c.FD), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	e.pid = c.PID
	e.other, err = unix.Mmap(int(f.Fd()), 0, c.Bytes, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	return err
}

type fakePosting struct {
	e             *fakeEnd
	op            string
	size          uint64
	local, remote []int32
}

func (e *fakeEnd) Prepare(op string, size uint64, local, remote []int32) (Posting, error) {
	if e.mode == "refuses" && len(local) > 1 {
		return nil, errors.New("more pieces than it takes")
	}
	return &fakePosting{e, op, size, local, remote}, nil
}

var errGone = errors.New("the other end is gone")

func (p *fakePosting) Post(context.Context) error {
	if p.e.mode == "crashes" && len(p.local) > 1 {
		panic("a bug of the library")
	}
	if unix.Kill(p.e.pid, 0) != nil {
		return errGone
	}
	for i := range p.local {
		here, there := p.e.memory[uint64(p.local[i])*p.size:][:p.size],
			p.e.other[uint64(p.remote[i])*p.size:][:p.size]
		if p.op == "read" {
			here, there = there, here
		}
		if p.e.mode != "lies" {
			copy(there, here)
		}
	}
	return nil
}

func (p *fakePosting) Close() error { return nil }

func (e *fakeEnd) Notify([]byte) error {
	e.other[len(e.other)-1]++
	return nil
}

func (e *fakeEnd) Receive() (bool, error) {
	last := &e.memory[len(e.memory)-1]
	if *last == 0 {
		time.Sleep(time.Microsecond)
		return false, nil
	}
	*last = 0
	return true, nil
}

// fake is a participant that behaves in that way.
func fake(t *testing.T, name, mode string, lane Lane) Participant {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	return Participant{Name: name, Lane: lane, Command: []string{exe},
		Env: []string{modeVariable + "=" + mode}}
}

// hang sleeps: select {} is a deadlock that Go ends where there is no cgo.
func hang() {
	for {
		time.Sleep(time.Hour)
	}
}
