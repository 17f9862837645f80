// SPDX-License-Identifier: Apache-2.0

// Command sluice measures, explains and exercises the transfer engine.
//
// Exit status: 0 when all is well, 1 for an error, 2 for a command line that
// cannot be understood, 130 when it was interrupted.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	ctx, restore := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM,
		syscall.SIGHUP)
	// A second signal ends the program at once; the kernel then ends its children. Not one that
	// comes with the first: timeout(1) sends its signal to the program and to the group.
	context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, restore) })
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}
