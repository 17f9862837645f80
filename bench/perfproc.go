// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// perfProcess is a server or a client.
type perfProcess struct {
	cmd   *exec.Cmd
	out   Tail          // read it after ended
	ended chan struct{} // closed when it is gone
	err   error         // of its end
}

// startPerf runs a benchmark in a process group of its own, so that a Ctrl-C is this
// process's, and that all of it can be killed. The environment is ours and env.
func startPerf(ctx context.Context, env []string, path string, args ...string) (*perfProcess,
	error) {
	c := &perfProcess{cmd: exec.CommandContext(ctx, path, args...), ended: make(chan struct{})}
	c.cmd.Env = append(c.cmd.Environ(), env...)
	c.cmd.Stdout, c.cmd.Stderr = &c.out, &c.out
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	c.cmd.Cancel = c.kill
	c.cmd.WaitDelay = time.Second // for a grandchild that holds the output
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", filepath.Base(path), err)
	}
	go func() {
		c.err = c.cmd.Wait()
		close(c.ended)
	}()
	return c, nil
}

func (c *perfProcess) kill() error {
	err := syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL)
	if errors.Is(err, syscall.ESRCH) {
		return nil
	}
	return err
}

// stop leaves nothing behind. The group is the process's own as long as that was not
// waited for.
func (c *perfProcess) stop() {
	select {
	case <-c.ended:
	default:
		_ = c.kill()
		<-c.ended
	}
}

// errPerfEarly is the end of a server before that of its client.
var errPerfEarly = errors.New("the server ended early")

// listening waits until the process listens on the port. To try and connect would be
// taken for the client.
func (c *perfProcess) listening(ctx context.Context, port int) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-c.ended:
			return fmt.Errorf("%w: %w", errPerfEarly, c.err)
		case <-tick.C:
		}
		if listens(c.cmd.Process.Pid, port) {
			return nil
		}
	}
}
