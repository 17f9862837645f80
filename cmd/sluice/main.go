// SPDX-License-Identifier: Apache-2.0

// Command sluice measures, explains and exercises the transfer engine.
//
// Exit status: 0 when all is well, 1 for an error, 2 for a command line that cannot be understood,
// 130 when it was interrupted.
//
// # How a command runs
//
// run parses the command line by newRoot's commands. What is wrong with it is a usageError and ends
// the command before anything is opened or started; so is a flag that would have no effect beside
// the others (refuse), and an empty value (checkEmpty). Results go to the standard output, all else
// to the standard error. An error becomes one sentence (sentence), in which fields of a Config are
// called by the names of the options that set them. A first signal ends the command in order, so
// that children and files are gone; a second one ends the process at once.
//
// A backend on the command line is NAME or NAME:OPTION=VALUE,... (backendSpec); package
// backends/byname opens it. Child processes are this program again: "peer ROLE BACKEND" is one end
// of a replay, "bench driver NAME ARGS" a participant of a benchmark. They end with their parent.
//
// # Which file to read
//
//   - root.go: the commands, usage errors and exit statuses; errors.go: sentences; output.go: JSON
//     and progress
//   - backends.go: --backend, and what the tool adds to a backend's options
//   - bench.go, benchdriver.go: flags into shapes and participants of package bench
//   - replay.go, replaygroups.go, requests.go, peer.go: flags into a replay of package replay
//   - explain.go: two engines that are asked for their way; explainplan.go: two groups of ranks
//   - load.go: safetensors files into memory
//   - cacheserve.go: the server of a KV cache; cacheconfig.go, cachemetrics.go: its config and
//     metrics; cacheclient.go, cacheuser.go: who asks it; cachecluster.go: nodes of a cluster;
//     cachedemo.go: one that is killed under load; cachereplay.go: a trace, and the optimum
//   - simulate.go: models; simulatesparse.go: of a card, by kv/sparse/simulate; simulatetrace.go:
//     of a cluster, by kv/schedule/simulate
//   - doctor.go, doctorbackends.go, doctorucx.go: what each backend says of this machine;
//     internal/machine: what the kernel and the NVIDIA driver say
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGHUP}
	if c, _, err := newRoot().Find(os.Args[1:]); err == nil && c.Name() == "serve" {
		signals = signals[:2] // SIGHUP has it read its config again
	}
	ctx, restore := signal.NotifyContext(context.Background(), signals...)
	// A second signal ends the program at once; the kernel then ends its children. Not one that
	// comes with the first: timeout(1) sends its signal to the program and to the group.
	context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, restore) })
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}
