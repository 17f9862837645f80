module example.com/backend

go 1.26.0

require (
	github.com/sluicehq/sluice v0.0.0
	golang.org/x/sys v0.49.0
)

replace github.com/sluicehq/sluice => ../..
