// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// stands is the backend of a child process. A byte on the input of the process has its next batch
// of bytes stand before it is submitted, and a further byte lets that go on.
type stands struct {
	driver.Backend
	asked   atomic.Bool
	goOn    chan struct{}
	request atomic.Uint64 // which the process hands over
}

type standsPeer struct {
	driver.Peer
	s *stands
}

func newStands(b driver.Backend) *stands {
	s := &stands{Backend: b, goOn: make(chan struct{})}
	go func() {
		var one [1]byte
		for stand := true; ; stand = !stand {
			if _, err := os.Stdin.Read(one[:]); err != nil {
				return
			}
			if stand {
				s.asked.Store(true)
			} else {
				s.goOn <- struct{}{}
			}
		}
	}()
	return s
}

func (s *stands) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := s.Backend.Connect(ctx, addr)
	return &standsPeer{p, s}, err
}

func (p *standsPeer) Submit(tag uint64, b *driver.Batch) error {
	if (len(b.Descs) > 0 || b.Pattern != nil) && p.s.asked.Swap(false) {
		fmt.Println("stands in", p.s.request.Load())
		<-p.s.goOn
		defer fmt.Println("has gone on")
	}
	return p.Peer.Submit(tag, b)
}

// child is such a process.
type child struct {
	*os.Process
	in  io.Writer
	out *bufio.Reader
}

// startChild starts this test binary with a flag. The test's end kills it.
func startChild(t *testing.T, flag, value string) *child {
	t.Helper()
	cmd := exec.Command(os.Args[0], flag, value)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // "signal: killed"
	})
	return &child{cmd.Process, in, bufio.NewReader(out)}
}

// stand asks the process to.
func (c *child) stand(t *testing.T) {
	t.Helper()
	_, err := c.in.Write([]byte{1})
	require.NoError(t, err)
}

// stood gives the request in which the process stands, once it does. It is closed without one if
// the process ends instead, or does not come to that.
func (c *child) stood() <-chan uint64 {
	in := make(chan uint64, 1)
	go func() {
		defer close(in)
		var request uint64
		if c.hear("stands in %d\n", &request) == nil {
			in <- request
		}
	}()
	return in
}

// letGo lets it go on, and waits until it has submitted.
func (c *child) letGo(t *testing.T) {
	t.Helper()
	c.stand(t)
	require.NoError(t, c.hear("has gone on\n"))
}

func (c *child) hear(format string, args ...any) error {
	over := time.AfterFunc(limit, func() { _ = c.Kill() })
	defer over.Stop()
	line, err := c.out.ReadString('\n')
	if err == nil {
		_, err = fmt.Sscanf(line, format, args...)
	}
	return err
}
