// What metal-cpp takes from Apple's IOSurface.
#pragma once
typedef struct __IOSurface* IOSurfaceRef;
